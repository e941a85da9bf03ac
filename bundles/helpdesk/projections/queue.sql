select t.id, t.title, t.priority, t.status, t.team, c.name as customer, a.name as assignee, t.due, t.breached
from ticket t
join principal mine on mine.id = :me
join customer c on c.id = t.customer
left join principal a on a.id = t.assignee
where t.status in ('triaged', 'open', 'waiting')
  and (t.team = mine.attributes ->> 'team' or mine.attributes ->> 'team' = 'all')
order by case t.priority when 'urgent' then 0 when 'high' then 1 when 'normal' then 2 else 3 end, t.due, t.id
